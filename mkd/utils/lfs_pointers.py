"""Pointers of Git LFS: the small text file that git leaves in place of a large one which was not fetched."""

LFS_POINTER = b"version https://git-lfs"
"""Its first bytes."""
LFS_HINT = "a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or download it"
