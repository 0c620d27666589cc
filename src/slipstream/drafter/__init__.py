"""The drafter network, its attention, anchors, loss and storage."""
