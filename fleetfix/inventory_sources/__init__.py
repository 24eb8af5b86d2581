"""Inventories as people have them: Ansible's, Slurm's, ClusterShell's, those of ssh.

Each module reads one kind and says in our words which hosts and groups there are (`Declared`). What it
does not understand it says; nothing is dropped in silence, and no password is taken.
"""
