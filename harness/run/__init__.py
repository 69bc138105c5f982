"""The live side of a run: engine processes, load generator, blocks, readings of the machine."""
