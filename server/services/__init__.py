"""The services that agents and operators call, and how bytes travel in and out."""
