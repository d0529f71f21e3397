"""What anybody can check offline: the audit log, two logs beside each other, where a model comes from."""
