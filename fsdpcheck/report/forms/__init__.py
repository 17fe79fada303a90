"""Forms of a report for other programs, each a pure function of kept sessions: JUnit, SARIF, Markdown, GitHub."""
