"""Linear attention between the public calls and the implementations: values, checks, operators."""
