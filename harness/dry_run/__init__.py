"""What one rank of a run would build, hold and send, found out on one machine without the other ranks."""
