"""Loading a user's code: references, what an import changes of the process, and which files a verdict depends on."""
