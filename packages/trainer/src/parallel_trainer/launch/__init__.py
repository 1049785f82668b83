"""Starting ranks, and finding out how this process was started."""
