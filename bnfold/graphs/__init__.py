"""Native graphs behind one port: each is lifted to a Program, and carries out a Plan's edits itself."""
