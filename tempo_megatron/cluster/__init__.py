"""What a job on one or several hosts needs: its ranks, the network between hosts, and `doctor`, which checks both."""
