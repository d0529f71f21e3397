"""Which of several coordinators on one database is the active one."""
