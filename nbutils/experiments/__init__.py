"""The book's own material: networks, trainers and measurements that are tested, and too long for a chapter's cell.

A formula is not here: it stands in its chapter.
"""
