"""The drivers of jobs: events in, transactions and messages out."""
