"""Pages to look at rollouts with, in a file or served to this machine."""
