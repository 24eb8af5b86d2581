"""The command line: one module a group of commands, nothing imported before it is needed."""
