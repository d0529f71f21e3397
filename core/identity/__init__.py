"""Who is who: certificates, what is revoked, signatures, invitations, and why a handshake fails."""
