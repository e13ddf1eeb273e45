"""Models of tables, by the libraries that train them: scikit-learn, XGBoost, LightGBM, CatBoost and Triton's FIL.

Each library has a module with a reader of its files. `base` serves what they read, and `onnx_form` serves it by ONNX
Runtime where that gives the same answers. Libraries are imported when a model needs them.
"""
