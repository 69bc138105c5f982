"""Blocks on the nodes of a Ray cluster: node.py is what a node does, driver.py what sends it there."""
