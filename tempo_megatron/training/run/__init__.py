"""Makes one frozen RunConfig of a command line and a DeepSpeed JSON."""
