"""What one to four chapters use: networks, trainers and measurements that are tested and too long for a cell.

A formula stays in its chapter.
"""
