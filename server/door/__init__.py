"""The one place between the wire's messages and the coordinator.

`from_agents` and `from_operators` read what others wrote; `to_agents` and `to_operators` write what they are
told. No message of protobuf's goes on from here but to the services, which receive and return them.
"""
