"""Prepares, checks and launches a job on several hosts: hostfile, hosts, the network between them, and the launcher.

It needs the standard library only, except for collectives.py, which ranks run, and installation.py.
"""
