"""Where artifacts are: the folder, the bucket, replicas, retention, backups."""
