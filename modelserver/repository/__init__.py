"""Which models lie on disk, which versions serve, and how one replaces another.

Control is on the event loop; files are read by pools of threads.
"""
