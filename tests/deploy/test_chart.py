"""The chart as helm renders it: valid objects, settings that the cluster takes, clear refusals."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config import ClusterConfig
from tests.deploy.conftest import PRESETS, ROOT, TWO_MODELS, given

EVERYTHING = (
    "gateway.autoscaling.enabled=true",
    "prefill.autoscaling.enabled=true",
    "decode.autoscaling.enabled=true",
    "redis.enabled=true",
    "scheduler.replicas=2",
    "telemetry.serviceMonitor.enabled=true",
    "telemetry.otlpEndpoint=http://collector:4317",
    "gateway.tls.existingSecret=tandem-tls",
    "internalTls.existingSecret=tandem-internal-tls",
)
RAY = ("ray.enabled=true",)
SERVICE = (*RAY, "ray.kind=RayService", "ray.serveConfigV2=applications: []")
CASES = [
    *((preset, ()) for preset in ("", *PRESETS)),
    *((f"{preset}+{TWO_MODELS}", ()) for preset in PRESETS),
    ("1p3d", EVERYTHING),
    (f"2p2d+{TWO_MODELS}", EVERYTHING),
    ("cpu", RAY),
    (f"cpu+{TWO_MODELS}", RAY),
]
CORE = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")


def _one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def _pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    workloads = [each for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    tests = [each["spec"] for each in objects if each["kind"] == "Pod"]
    return [*(each["spec"]["template"]["spec"] for each in workloads), *tests]


def _settings(objects: list[dict[str, Any]], folder: Path) -> ClusterConfig:
    """What the pods are told, as they read it."""
    file = folder / "cluster.toml"
    file.write_text(_one(objects, "ConfigMap", "tandem")["data"]["cluster.toml"])
    return ClusterConfig.from_toml(file)


@pytest.mark.parametrize("preset", ["", "cpu"])
def test_the_settings_are_some_that_every_process_takes(render, tmp_path: Path, preset: str):
    settings = _settings(render(preset), tmp_path)
    assert settings.gateway.host == "0.0.0.0"
    assert settings.gateway.asks_who_calls is (preset == "")
    assert settings.network.schedulers == ("tandem-scheduler-0.tandem-scheduler.default.svc:50052",)


def test_each_model_has_pools_of_its_own_and_its_workers_are_told_which_they_serve(
    render, tmp_path: Path
):
    objects = render(f"2p2d+{TWO_MODELS}", "models[0].prefill.replicas=2")
    settings = _settings(objects, tmp_path)
    assert [each.served_name for each in settings.models] == ["llama-3.1-8b", "qwen"]
    assert settings.models[1].max_model_len == 16384
    assert settings.num_workers == (3, 2)
    selectors = []
    for name, served, replicas in (
        ("llama-prefill", "llama-3.1-8b", 2),
        ("llama-decode", "llama-3.1-8b", 1),
        ("qwen-prefill", "qwen", 1),
        ("qwen-decode", "qwen", 1),
    ):
        spec = _one(objects, "Deployment", f"tandem-{name}")["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert spec["replicas"] == replicas
        assert container["args"][:2] == ["run", name.partition("-")[2]]
        assert f"--serves={served}" in container["args"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"  # the preset's
        labels = spec["template"]["metadata"]["labels"]
        selector = spec["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        selectors.append(selector)
        budget = _one(objects, "PodDisruptionBudget", f"tandem-{name}")["spec"]
        assert budget["selector"]["matchLabels"] == selector
    assert all(selectors.count(each) == 1 for each in selectors), "no pool takes another's pods"


def test_a_pool_scales_by_the_queue_of_its_own_model(render):
    objects = render(f"2p2d+{TWO_MODELS}", *EVERYTHING)
    scaled = _one(objects, "ScaledObject", "tandem-llama-decode")["spec"]
    assert scaled["scaleTargetRef"]["name"] == "tandem-llama-decode"
    queue, usage = (each["metadata"]["query"] for each in scaled["triggers"])
    assert 'model="llama-3.1-8b"' in queue
    assert 'role="decode",model_name="llama-3.1-8b"' in usage


def test_certificates_between_pods_are_mounted_where_the_settings_say(render, tmp_path: Path):
    objects = render("cpu", "internalTls.existingSecret=tandem-internal-tls")
    told = _settings(objects, tmp_path).internal_tls
    folder = "/etc/tandem/internal-tls"
    assert (told.cert_file, told.ca_file) == (f"{folder}/tls.crt", f"{folder}/ca.crt")
    workloads = [each for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) == 4
    for each in workloads:
        pod = each["spec"]["template"]["spec"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "internal-tls"]
        assert volume["secret"]["secretName"] == "tandem-internal-tls"
        mounts = pod["containers"][0]["volumeMounts"]
        assert {"name": "internal-tls", "mountPath": folder, "readOnly": True} in mounts


def test_no_pod_runs_as_root_writes_its_image_or_holds_a_token(render):
    pods = _pods(render("1p3d", *EVERYTHING))
    assert len(pods) == 6
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"]


def test_a_pod_has_the_time_to_drain_and_a_worker_to_load(render):
    objects = render("", "drainSeconds=300", "gateway.lameDuckSeconds=15")
    for name in ("gateway", "prefill", "decode"):
        pod = _one(objects, "Deployment", f"tandem-{name}")["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 335
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 900


def test_nothing_reaches_a_pod_but_what_a_policy_names(render):
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in render("")
        if each["kind"] == "NetworkPolicy"
    }
    assert "ingress" not in policies["tandem-default-deny"]
    assert policies["tandem-default-deny"]["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policies["tandem-scheduler"]["ingress"]
    assert rule["ports"] == [{"port": 50052, "protocol": "TCP"}]
    assert "from" in rule


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            "gateway.apiKeys.existingSecret=",
            "name a Secret with the key keys.toml, or",
        ),
        ("scheduler.replicas=2", "scheduler.replicas is 2: standby schedulers need redis.enabled"),
        ("settings.gateway.host=::", "settings.gateway.host is what the chart sets itself"),
        ("settings.models={a}", "settings.models is what the chart sets itself"),
        ("settings.model=a", "settings.model is what the chart sets itself"),
        ("gateway.replcas=3", "at '/gateway': additional properties 'replcas' not allowed"),
        ("ray.kind=RayService,ray.enabled=true", "it needs a Serve application"),
    ],
)
def test_a_value_that_will_not_do_is_refused_in_words(helm, value: str, told: str):
    _is_refused(helm, "", value, told)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("model=a", "models: each has its own model and servedName"),
        ("models[1].name=llama", "models: two are named llama"),
        ("models[0].decode.replicas=0", "models: llama has no decode workers"),
        ("models[0].prefil.replicas=1", "at '/models/0': additional properties 'prefil' not"),
        ("models[0].settings.dtype=int8", "at '/models/0/settings/dtype': value must be one of"),
    ],
)
def test_a_model_that_will_not_do_is_refused_in_words(helm, value: str, told: str):
    _is_refused(helm, f"2p2d+{TWO_MODELS}", value, told)


def _is_refused(helm, preset: str, value: str, told: str) -> None:
    done = helm("template", "tandem", ".", *given(preset, [value]))
    assert done.returncode != 0
    assert told in done.stderr


@pytest.mark.deploy
@pytest.mark.parametrize(("preset", "values"), CASES)
def test_helm_has_nothing_to_say_against_it(helm, preset: str, values: tuple[str, ...]):
    done = helm("lint", "--strict", ".", *given(preset, values))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deploy
@pytest.mark.parametrize(("preset", "values"), CASES)
def test_every_object_is_one_that_kubernetes_takes(
    render, program, tmp_path: Path, preset: str, values: tuple[str, ...]
):
    objects = [each for each in render(preset, *values) if each["apiVersion"] in CORE]
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    done = subprocess.run(
        [str(program("kubernetes-validate")), "--strict", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("INFO") >= len(objects), done.stdout


@pytest.mark.deploy
@pytest.mark.parametrize(("preset", "count"), [("1p3d", 4), (f"2p2d+{TWO_MODELS}", 6)])
def test_monitors_and_scalers_are_ones_that_their_operators_take(render, preset: str, count: int):
    modules = Path(sys.prefix) / "deploy" / "npm" / "node_modules"
    if shutil.which("node") is None or not modules.exists():
        pytest.skip("node and the models of npm are not installed: make test-deploy")
    kinds = ("ScaledObject", "ServiceMonitor")
    custom = [each for each in render(preset, *EVERYTHING) if each["kind"] in kinds]
    script = modules.parent / "models.mjs"  # imports are looked up beside the script
    shutil.copy(Path(__file__).with_name("models.mjs"), script)
    done = subprocess.run(
        ["node", str(script)],
        input=json.dumps(custom),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(custom) == count


@pytest.mark.deploy
@pytest.mark.parametrize("values", [RAY, SERVICE])
def test_the_ray_variant_is_one_that_kuberay_takes(render, tmp_path: Path, values):
    crds = ROOT.parent / "shared" / "crds"
    validate = ROOT.parent / "shared" / "tools" / "validate_crd.py"
    if not crds.is_dir():
        pytest.skip(f"{crds} is not there")
    ray = [each for each in render("cpu", *values) if each["apiVersion"] == "ray.io/v1"]
    file = tmp_path / "ray.yaml"
    file.write_text(yaml.safe_dump_all(ray))
    done = subprocess.run(
        [sys.executable, str(validate), *map(str, crds.glob("*.yaml")), "--", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 passed, 0 failed" in done.stdout, done.stdout


def test_the_ray_variant_runs_the_command_that_places_the_cluster(render):
    objects = render("cpu", *RAY)
    driver = _one(objects, "Deployment", "tandem-ray-driver")["spec"]["template"]["spec"]
    assert driver["containers"][0]["args"][:3] == [
        "serve",
        "--on=ray",
        "--address=ray://tandem-ray-head-svc:10001",
    ]
    assert not any(each["metadata"]["name"] == "tandem-decode" for each in objects)
