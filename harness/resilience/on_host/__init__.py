"""What runs on each host beside the ranks: it starts them, and lets none of them outlive the run.

`ranks` starts and ends them, `standby` is the process that has imported everything and forks them, `keeper` ends what a
killed launch has left, `processes` finds all that belongs to a run. Only the standby process imports torch.
"""
