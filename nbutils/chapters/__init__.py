"""The book's own material: networks, trainers and measurements that are tested, and too long for a chapter's cell.

Most modules serve one chapter; ``growth`` (5, 19) and ``scale_invariant`` (2, 3, 5, 19) serve several. A formula is not
here: it stands in its chapter.
"""
