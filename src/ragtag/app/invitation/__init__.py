"""Invitations to a crew: ``token`` is what one holds, as a line of text; ``invite`` makes and shows it."""
