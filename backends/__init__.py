"""The bundled backends, a package each, installed as `modelserver_backends`."""
