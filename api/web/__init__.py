"""What the pages share: a web server within an event loop, what every request passes first, their files."""
