"""The gateway process: `python -m gateway`, started by a launcher."""

import asyncio

from core import log, process
from core.admin import Admin, serve_admin
from core.block_hash import BlockHasher
from core.errors import ConfigError
from core.health import told_by_model
from core.metrics.shared import FenceCollector
from core.network import leader_finder
from core.ports import public_ports_of, tell_ports, told_ports
from core.process import ProcessContext
from core.telemetry.names import Role
from core.tickets import load_secret
from gateway.api import InferenceApi
from gateway.auth import authenticator_of
from gateway.cluster_metrics import ClusterCollector
from gateway.cluster_source import cluster_source
from gateway.decode_link import DecodeLinks
from gateway.grammar_check import GrammarCheck
from gateway.grpc_gate import GrpcGate
from gateway.grpc_server import GrpcService
from gateway.grpc_service import InferenceService
from gateway.http_app import create_app
from gateway.latency_curves import LatencyCurves
from gateway.loaded_model import LoadedModel
from gateway.operator_page import page_routes
from gateway.readiness import Readiness
from gateway.recent import RecentRequests
from gateway.request_metrics import RequestMetrics
from gateway.scheduler_link import SchedulerLink
from gateway.servers import serve
from gateway.session import ClusterBackend
from gateway.shared_state import shared_state

_CLOSE_TIMEOUT_S = 2.0  # for answers on their way out, after the requests have ended


async def main(context: ProcessContext, stop: asyncio.Event) -> None:
    """Serves until told to stop, then lets running requests end within the drain timeout."""
    config = context.config
    logger = log.configure(config, context.me.name)
    if not config.gateway.asks_who_calls:
        told = logger.info if config.gateway.loopback else logger.warning
        told("nobody_is_asked_for_a_key", host=config.gateway.host)
    async with serve_admin(context) as admin:
        await _serve(context, stop, admin)


async def _serve(context: ProcessContext, stop: asyncio.Event, admin: Admin) -> None:
    config = context.config
    authenticator = authenticator_of(config.gateway)
    readiness = Readiness()

    def look() -> None:
        reasons = {model.name: scheduler.not_ready(model.name) for model in context.models}
        told = told_by_model(reasons)
        if stop.is_set():
            readiness.say("the gateway is stopping")
        elif None in reasons.values():  # whoever can serve some models, serves those
            readiness.say(None, in_part=told)
        else:
            readiness.say(told)

    admin.registry.register(FenceCollector(context.fence))
    scheduler = SchedulerLink(
        leader_finder(context),
        context.me,
        on_pools=look,
        admin_address=admin.address,
        dial=context.dial,
    )

    async with (
        shared_state(context, admin.registry, on_lease=scheduler.leader_heard) as shared,
        cluster_source(context) as source,
        asyncio.TaskGroup() as tasks,
    ):
        decodes = DecodeLinks(
            context.me,
            tasks,
            on_ended=scheduler.settle,
            max_unread_tokens=config.gateway.max_unread_tokens,
            dial=context.dial,
        )
        backend = ClusterBackend(scheduler, decodes, config.gateway, hasher=_hasher(context))
        admin.registry.register(ClusterCollector(backend))
        admin.health.ready_if(readiness.not_ready)
        models = _load(context, admin)
        api = InferenceApi(
            models, config.gateway, backend, quotas=shared.quotas, journal=shared.journal
        )
        services = _services(api, context, readiness)
        recent = RecentRequests(config.telemetry.recent_requests)
        curves = LatencyCurves([model.metrics for model in models], recent)
        app = create_app(
            api,
            readiness=readiness,
            authenticator=authenticator,
            tracer=context.tracer,
            recent=recent,
        )
        names = [model.name for model in context.models]
        pages = page_routes(recent, curves, source.cluster, models=names)
        admin.routes.extend(pages)
        beside = [
            tasks.create_task(authenticator.watch()),
            tasks.create_task(scheduler.run()),
            tasks.create_task(curves.run()),
        ]
        async with serve(
            config.gateway.model_copy(update=_ports(context)),
            app,
            services,
            drain_timeout_s=config.drain_timeout_s + _CLOSE_TIMEOUT_S,
            interceptors=[GrpcGate(authenticator, context.tracer, recent)],
        ) as serving:
            bound = {"http": serving.http_port, "grpc": serving.grpc_port}
            tell_ports(context.run_dir, context.me.name, bound)
            following = tasks.create_task(serving.follow(readiness.changes()))
            admin.health.started()
            context.mark_ready()
            await stop.wait()
            look()
            await asyncio.sleep(config.gateway.lame_duck_s)
            serving.close_doors()
            await backend.drain(config.drain_timeout_s)
            following.cancel()
        api.close()
        for task in beside:
            task.cancel()
        decodes.close()


def _load(context: ProcessContext, admin: Admin) -> list[LoadedModel]:
    config = context.config
    # What is checked is the grammar alone: one for all models.
    grammars = GrammarCheck(max_bytes=config.gateway.max_grammar_bytes)
    window = max(model.card.context_window for model in context.models)
    return [
        LoadedModel(
            model.card,
            model.name,
            model.config,
            aliases=model.aliases,
            grammars=grammars,
            metrics=RequestMetrics(
                admin.vllm.of(model.name), window=window, objectives=config.telemetry
            ),
        )
        for model in context.models
    ]


def _services(
    api: InferenceApi, context: ProcessContext, readiness: Readiness
) -> list[GrpcService]:
    services: list[GrpcService] = [InferenceService(api)]
    if context.config.gateway.vllm_engine:
        try:
            from gateway.vllm_engine import VllmEngine
        except ModuleNotFoundError as error:
            raise ConfigError(
                "gateway.vllm_engine needs smg-grpc-proto: install the extra `smg`"
            ) from error
        services.append(VllmEngine(api, context.card, context.config, readiness=readiness))
    return services


def _ports(context: ProcessContext) -> dict[str, int]:
    """Those chosen, else those of this gateway's life before: its clients know them."""
    told = told_ports(context.run_dir, context.me.name)
    chosen = public_ports_of(context.config, context.me.name)
    return {f"{name}_port": port or told.get(name, 0) for name, port in chosen.items()}


def _hasher(context: ProcessContext) -> BlockHasher | None:
    engine = context.config.engine
    if not engine.prefix_cache:
        return None
    return BlockHasher(load_secret(context.run_dir), engine.block_size)


if __name__ == "__main__":
    process.run(main, Role.GATEWAY)
