"""What a process and the worker processes beside it share: messages over a socket, vectors in memory."""
