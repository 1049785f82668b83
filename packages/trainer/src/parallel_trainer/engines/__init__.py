"""What can train a plan: this project itself, or another library to whose calls the plan is mapped."""
