"""Find out, on one machine and without the other ranks, what one rank of a run would build, hold and send."""
