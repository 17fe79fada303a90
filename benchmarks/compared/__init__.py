"""Training scripts that train alike on any number of ranks, and bugs planted in them that make them differ.

FROZEN: "Compared scripts: bugs frozen before the tool exists". The bugs of that commit were written before anything
compared them; a later change of one of their texts, truths or expectations is a commit of its own that says why.
"""
