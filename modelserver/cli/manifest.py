"""`modelserver manifest k8s | compose | kserve`: deployment manifests for kubectl or docker compose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from modelserver.cli.output import print_line
from modelserver.errors import InvalidArgumentError

Document = dict[str, Any]

# Links to the files of docker/, which the deployment tests verify.
MANIFESTS = Path(__file__).resolve().parent / "manifests"
_NAME = "modelserver"
_CPU_SUFFIX, _GPU_SUFFIX = "-cpu", "-cuda"
_GPU = "nvidia.com/gpu"
# Names of Services are the strictest (RFC 1035 labels).
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Deployment:
    """The values to replace. `models` is a claim (`pvc://<claim>`), an object store (`s3://...`), or a directory.

    An empty `image` means the image of docker/Dockerfile, with CUDA if `gpus` is not 0.
    """

    name: str = _NAME
    namespace: str = ""
    image: str = ""
    replicas: int = 2
    models: str = ""
    gpus: int = 0
    keys_secret: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError for names that Kubernetes would refuse."""
        for flag, name in (("--name", self.name), ("--namespace", self.namespace), ("--keys-secret", self.keys_secret)):
            if name and not _LABEL.fullmatch(name):
                raise InvalidArgumentError(
                    f"{flag} expects up to 63 of a-z, 0-9 and '-', the first a letter, the last no '-', got '{name}'"
                )


def kubernetes(deployment: Deployment) -> list[Document]:
    """Everything that a namespace needs to serve a repository. Raises InvalidArgumentError for unusable `models`."""
    documents = _read("k8s")
    workload = _of_kind(documents, "Deployment")
    workload["spec"]["replicas"] = deployment.replicas
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = _image(container["image"], deployment)
    if deployment.gpus:
        _use_gpus(workload, container, pod, deployment.gpus)
    options = _of_kind(documents, "ConfigMap")["data"]
    _use_models(documents, pod, container, options, deployment.models)
    if deployment.keys_secret:
        _use_keys(pod, container, options, deployment.keys_secret)
    renamed: list[Document] = [_renamed(document, deployment.name) for document in documents]
    for document in renamed:
        if deployment.namespace:
            document["metadata"]["namespace"] = deployment.namespace
    return renamed


def compose(deployment: Deployment) -> Document:
    """The server as a single service, without the monitoring services."""
    (document,) = _read("compose")
    service = document["services"]["server"]
    del service["build"]
    service["image"] = _image(service["image"], deployment)
    service["volumes"] = [f"{deployment.models or './models'}:/models:ro", "cache:/var/cache/modelserver"]
    if "://" in deployment.models:
        service["volumes"] = ["cache:/var/cache/modelserver"]
        service["command"] = [
            f"--model-repository={deployment.models}" if word.startswith("--model-repository=") else word
            for word in service["command"]
        ]
    if deployment.gpus:
        device = {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {"name": deployment.name, "services": {"server": service}, "volumes": {"cache": None}}


def kserve(deployment: Deployment) -> list[Document]:
    """The runtimes of KServe, and with `models` an InferenceService that uses the runtime for whole repositories."""
    documents = _read("kserve")
    for document in documents:
        for container in document["spec"]["containers"]:
            container["image"] = _image(container["image"], deployment)
            if deployment.gpus:
                container["resources"] = {"limits": {_GPU: deployment.gpus}}
    if deployment.models:
        documents.append(_inference_service(deployment, documents[-1]["metadata"]["name"]))
    return documents


def _inference_service(deployment: Deployment, runtime: str) -> Document:
    model = {
        "runtime": runtime,
        "modelFormat": {"name": "modelserver", "version": "1"},
        "protocolVersion": "v2",
        "storageUri": deployment.models,
    }
    metadata = {"name": deployment.name}
    if deployment.namespace:
        metadata["namespace"] = deployment.namespace
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": {"minReplicas": deployment.replicas, "model": model}},
    }


def dump(documents: list[Document]) -> str:
    """YAML of some documents."""
    return yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=False, width=120)


def _read(name: str) -> list[Document]:
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


def _of_kind(documents: list[Document], kind: str) -> Document:
    return next(document for document in documents if document["kind"] == kind)


def _image(default: str, deployment: Deployment) -> str:
    if deployment.image:
        return deployment.image
    return default.removesuffix(_CPU_SUFFIX) + _GPU_SUFFIX if deployment.gpus else default


def _use_gpus(workload: Document, container: Document, pod: Document, count: int) -> None:
    container["resources"]["limits"][_GPU] = count
    pod["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
    # A node has no spare GPU for a second pod while one is replaced.
    workload["spec"]["strategy"]["rollingUpdate"] = {"maxUnavailable": 1, "maxSurge": 0}


def _use_models(documents: list[Document], pod: Document, container: Document, options: Document, models: str) -> None:
    if not models:
        return
    claim = _of_kind(documents, "PersistentVolumeClaim")
    documents.remove(claim)
    if models.startswith("pvc://"):
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "models")
        volume["persistentVolumeClaim"]["claimName"] = models.removeprefix("pvc://").strip("/")
        return
    if "://" not in models:
        raise InvalidArgumentError(
            f"--models expects pvc://<claim> or the address of an object store (s3://, gs://, as://), got '{models}'"
        )
    for owner, key in ((pod, "volumes"), (container, "volumeMounts")):
        owner[key] = [entry for entry in owner[key] if entry["name"] != "models"]
    _set_option(options, "model-repository", [models])
    _set_option(options, "cloud-cache-directory", "/var/cache/modelserver")
    # The network policy allows only DNS outwards; an object store needs HTTPS too.
    egress = _of_kind(documents, "NetworkPolicy")["spec"]["egress"]
    egress.append({"ports": [{"protocol": "TCP", "port": 443}]})


def _use_keys(pod: Document, container: Document, options: Document, secret: str) -> None:
    _set_option(options, "api-keys-file", "/etc/modelserver-keys/keys.yaml")
    pod["volumes"].append({"name": "keys", "secret": {"secretName": secret, "defaultMode": 0o440}})
    container["volumeMounts"].append({"name": "keys", "mountPath": "/etc/modelserver-keys", "readOnly": True})


def _set_option(options: Document, name: str, value: object) -> None:
    document = yaml.safe_load(options["options.yaml"])
    document[name] = value
    options["options.yaml"] = yaml.safe_dump(document)


def _renamed(value: Any, name: str) -> Any:
    """The document with its objects renamed to `name`; the application's name stays."""
    if isinstance(value, dict):
        return {
            key: inner if key in ("app.kubernetes.io/name", "image") else _renamed(inner, name)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_renamed(inner, name) for inner in value]
    if isinstance(value, str) and (value == _NAME or value.startswith(f"{_NAME}-")):
        return name + value.removeprefix(_NAME)
    return value


Name = Annotated[str, typer.Option(help="Name of what is made.")]
Namespace = Annotated[str, typer.Option(help="Namespace of the objects.")]
Image = Annotated[str, typer.Option(help="The server's image; default: the image of docker/Dockerfile.")]
Gpus = Annotated[int, typer.Option(min=0, help="NVIDIA GPUs for each replica.")]


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


manifest = typer.Typer(no_args_is_help=True, help="Print deployment manifests: for Kubernetes, docker compose, KServe.")
manifest.command("k8s")(print_kubernetes)
manifest.command("compose")(print_compose)
manifest.command("kserve")(print_kserve)
