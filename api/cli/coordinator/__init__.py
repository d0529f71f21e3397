"""Commands of the coordinator and its operators: service, certificates, trust, backups, audit."""
