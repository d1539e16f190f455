"""Would it fit: the arithmetic of an engine's memory, from config.json, the card, and the flags, before any boot.

Pure but for reading config.json; it never looks at a device, never imports an engine, and knows no model by name.
"""

from __future__ import annotations

from .predictor import predict
from .values import Box, PredictError, Prediction, Rejection

__all__ = ["Box", "PredictError", "Prediction", "Rejection", "predict"]
