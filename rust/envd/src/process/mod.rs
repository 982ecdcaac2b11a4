//! `process.Process` RPCs.
//!
//! A process lives independently of the stream that started it: when a client goes away the process stays, others can attach,
//! and its result is kept for a while after its end. Only its timeout, a signal or its own exit ends it.

pub mod fd;
mod input;
pub mod output;
pub mod spawn;
mod start;
pub mod table;
mod wire;

use std::sync::Arc;

use nix::sys::signal::Signal;

use crate::connect::{client_stream, server_stream, unary, EventSink, MessageSource};
use crate::error::RpcError;
use crate::http::{Request, Response};
use crate::state::State;
use output::Item;
use table::Process;
use wire::{
    data_frame, required, Empty, EventMessage, ListResponse, SelectRequest, Selector, SendInputRequest,
    SendSignalRequest, StartRequest, StreamInputRequest, UpdateRequest,
};

/// Answers `POST /process.Process/<method>`. The access token has been checked.
pub async fn dispatch(method: &str, request: Request, state: Arc<State>) -> Response {
    let table = state.processes.clone();
    match method {
        "Start" => {
            server_stream(request, EventMessage::keepalive(), |call, input: StartRequest, sink| async move {
                let user = state.effective_user(&call.headers)?;
                // A task of its own: a client that leaves meanwhile must not leave half a process behind.
                let starting = tokio::spawn(start::start(input, user, call.timeout, state));
                let process =
                    starting.await.map_err(|error| RpcError::internal(format!("cannot start: {error}")))??;
                stream_events(&process, &sink).await
            })
            .await
        }
        "Connect" => {
            server_stream(request, EventMessage::keepalive(), |_, input: SelectRequest, sink| async move {
                let process = table.find(&required(input.process, "process")?, true)?;
                stream_events(&process, &sink).await
            })
            .await
        }
        "List" => unary(request, |_, _: Empty| async move { Ok(ListResponse { processes: table.list() }) }).await,
        "Update" => {
            unary(request, |_, input: UpdateRequest| async move {
                let process = running(&state, input.process)?;
                if let Some(pty) = input.pty {
                    process.input.resize(required(pty.size, "pty.size")?)?;
                }
                Ok(Empty {})
            })
            .await
        }
        "SendInput" => {
            unary(request, |_, input: SendInputRequest| async move {
                let process = running(&state, input.process)?;
                process.input.send(&required(input.input, "input")?).await?;
                Ok(Empty {})
            })
            .await
        }
        "StreamInput" => client_stream(request, |_, source| stream_input(state, source)).await,
        "SendSignal" => {
            unary(request, |_, input: SendSignalRequest| async move {
                let process = running(&state, input.process)?;
                send_signal(&process, input.signal)?;
                Ok(Empty {})
            })
            .await
        }
        "CloseStdin" => {
            unary(request, |_, input: SelectRequest| async move {
                running(&state, input.process)?.input.close()?;
                Ok(Empty {})
            })
            .await
        }
        _ => RpcError::unimplemented(format!("process.Process/{method} does not exist")).into_response(),
    }
}

fn running(state: &State, selector: Option<Selector>) -> Result<Arc<Process>, RpcError> {
    state.processes.find(&required(selector, "process")?, false)
}

/// Start, output as it comes, end. Returns when the process has ended or the client has gone.
async fn stream_events(process: &Process, sink: &EventSink) -> Result<(), RpcError> {
    let subscription = process.output.subscribe();
    if !sink.send(&EventMessage::start(process.pid)).await {
        return Ok(());
    }
    loop {
        let alive = match subscription.next().await {
            Item::Data(stream, data) => sink.send_frame(data_frame(stream, &data)).await,
            Item::End(end) => {
                sink.send(&EventMessage::end(end)).await;
                return Ok(());
            }
            Item::CutOff => {
                return Err(RpcError::resource_exhausted(format!(
                    "the output of process {} was not read for {} s while other clients waited for it",
                    process.pid,
                    output::STALL_LIMIT.as_secs()
                )))
            }
        };
        if !alive {
            return Ok(());
        }
    }
}

async fn stream_input(state: Arc<State>, mut source: MessageSource<StreamInputRequest>) -> Result<Empty, RpcError> {
    let mut process = None;
    while let Some(message) = source.next().await? {
        match message {
            StreamInputRequest { start: Some(start), .. } => process = Some(running(&state, start.process)?),
            StreamInputRequest { data: Some(data), .. } => {
                let process = required(process.as_ref(), "start")?;
                process.input.send(&required(data.input, "data.input")?).await?;
            }
            // A keepalive, or an event newer than this daemon.
            _ => {}
        }
    }
    Ok(Empty {})
}

/// SIGTERM and SIGKILL go to the whole process group: a shell's children must not outlive it.
fn send_signal(process: &Process, number: i32) -> Result<(), RpcError> {
    let signal = Signal::try_from(number).map_err(|_| {
        RpcError::invalid_argument(format!("{number} is not a signal, send SIGNAL_SIGTERM or SIGNAL_SIGKILL"))
    })?;
    process.signal_group(signal).map_err(|errno| match errno {
        nix::errno::Errno::ESRCH => RpcError::not_found(format!("process with pid {} not found", process.pid)),
        errno => RpcError::internal(format!("cannot signal process {}: {}", process.pid, errno.desc())),
    })
}
