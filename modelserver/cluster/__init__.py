"""Servers on the machines of a Ray cluster: started, watched, replaced, and scaled as a deployment file says."""
