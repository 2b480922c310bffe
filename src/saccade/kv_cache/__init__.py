"""The paged cache: writing and moving pages, and the manager that hands them out."""
