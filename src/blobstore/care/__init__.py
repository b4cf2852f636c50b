"""Care of a store: what is damaged, what nobody needs, who needs what, and how two models differ. One noun a file."""
