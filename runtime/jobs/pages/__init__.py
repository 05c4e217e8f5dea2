"""What the jobs' pages share: one look, tables, drawings, and the field's terms explained."""
