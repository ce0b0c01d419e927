"""Instructors' tools: student notebooks from solutions, execution, lint.

They need the extra ``course`` (``pip install -e '.[course]'``) and no PyTorch.
"""
