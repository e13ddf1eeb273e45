"""`modelserver manifest k8s | compose | kserve`: deployment manifests for kubectl or docker compose."""

from __future__ import annotations

from typing import Annotated

import typer

from modelserver.cli.deployments import Deployment, compose, dump, kserve, kubernetes
from modelserver.cli.output import print_line

Name = Annotated[str, typer.Option(help="Name of what is made.")]
Namespace = Annotated[str, typer.Option(help="Namespace of the objects.")]
Image = Annotated[str, typer.Option(help="The server's image; default: the image of docker/Dockerfile.")]
Gpus = Annotated[int, typer.Option(min=0, help="NVIDIA GPUs for each replica.")]


def register(app: typer.Typer) -> None:
    manifests = typer.Typer(help="Print deployment manifests: for Kubernetes, docker compose, KServe.")
    manifests.command("k8s")(print_kubernetes)
    manifests.command("compose")(print_compose)
    manifests.command("kserve")(print_kserve)
    app.add_typer(manifests, name="manifest", no_args_is_help=True)


def print_kubernetes(
    name: Name = "modelserver",
    namespace: Namespace = "",
    image: Image = "",
    replicas: Annotated[int, typer.Option(min=0, help="Pods.")] = 2,
    models: Annotated[str, typer.Option(help="pvc://<claim>, or s3://, gs://, as://; default: a new claim.")] = "",
    gpus: Gpus = 0,
    keys_secret: Annotated[str, typer.Option(help="Secret with a keys.yaml, see 'modelserver keys'.")] = "",
) -> None:
    """Deployment, services, disruption budget, network policy: modelserver manifest k8s | kubectl apply -f -"""
    deployment = Deployment(name, namespace, image, replicas, models, gpus, keys_secret)
    print_line(dump(kubernetes(deployment)).rstrip())


def print_compose(
    name: Name = "modelserver",
    image: Image = "",
    models: Annotated[str, typer.Option(help="Directory of models, or s3://, gs://, as://.")] = "./models",
    gpus: Gpus = 0,
) -> None:
    """The server as a service: modelserver manifest compose > compose.yaml"""
    print_line(dump([compose(Deployment(name, image=image, models=models, gpus=gpus))]).rstrip())


def print_kserve(
    name: Name = "modelserver",
    namespace: Namespace = "",
    image: Image = "",
    models: Annotated[str, typer.Option(help="storageUri of a repository; adds an InferenceService.")] = "",
    replicas: Annotated[int, typer.Option(min=0, help="Fewest pods of the InferenceService.")] = 1,
    gpus: Gpus = 0,
) -> None:
    """ClusterServingRuntimes, and an InferenceService for --models."""
    print_line(dump(kserve(Deployment(name, namespace, image, replicas, models, gpus))).rstrip())
