"""Everything before and around a job on several hosts: the hostfile, its hosts, the network between them, the launcher.

Needs the standard library only, except for collectives.py, which is what ranks run.
"""
