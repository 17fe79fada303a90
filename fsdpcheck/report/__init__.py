"""What people and programs read: progress, the table, findings, the JSON document. Text in, text out; no torch."""
