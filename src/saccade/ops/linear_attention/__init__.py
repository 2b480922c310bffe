"""Linear attention: a feature map of queries and keys in the place of the softmax."""
