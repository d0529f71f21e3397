"""What several commands share: options, output, how rounds read, services of a machine."""
