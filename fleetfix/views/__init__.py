"""Everything that is shown: readers of records and folded state, pure where they make text."""
