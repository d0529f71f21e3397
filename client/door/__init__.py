"""The one place between the wire's messages and the agent: `incoming` reads them, `outgoing` makes them."""
