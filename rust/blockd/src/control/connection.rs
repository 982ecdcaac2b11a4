//! One client.

use std::sync::Arc;

use serde_json::{json, Map, Value};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, Semaphore};
use tokio::task::JoinSet;

use super::stages::Staged;
use crate::control::{Op, Service};
use crate::Error;

/// Longest line taken in, in bytes.
const MAX_LINE: usize = 1 << 20;
/// Requests of one connection in flight; the next is read when one of them is answered.
const MAX_IN_FLIGHT: usize = 128;
/// Answers and events that wait for a slow reader.
const MAX_UNSENT: usize = 256;

/// Serves a connection until the client closes it.
pub async fn serve(stream: UnixStream, service: Arc<Service>, bulk: Arc<Semaphore>) {
    let (read, write) = stream.into_split();
    let (replies, outgoing) = mpsc::channel(MAX_UNSENT);
    // Dropping the last sender ends the writer, which closes the connection.
    tokio::join!(take_requests(read, service, bulk, replies), send(write, outgoing));
}

async fn send(mut write: OwnedWriteHalf, mut outgoing: mpsc::Receiver<Value>) {
    while let Some(value) = outgoing.recv().await {
        let mut line = value.to_string().into_bytes();
        line.push(b'\n');
        if write.write_all(&line).await.is_err() {
            // The client is gone. Its operations go on; nobody hears of them.
            return;
        }
    }
}

async fn take_requests(read: OwnedReadHalf, service: Arc<Service>, bulk: Arc<Semaphore>, replies: mpsc::Sender<Value>) {
    let mut read = BufReader::new(read);
    let in_flight = Arc::new(Semaphore::new(MAX_IN_FLIGHT));
    let staged = Arc::new(Staged::default());
    let mut tasks = JoinSet::new();
    let mut line = Vec::new();
    loop {
        while tasks.try_join_next().is_some() {}
        line.clear();
        match next_line(&mut read, &mut line).await {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                let _ = replies.send(failure(&Value::Null, &error)).await;
                break;
            }
        }
        let (id, mut op) = match parse(&line) {
            Ok(parsed) => parsed,
            Err((id, error)) => {
                if replies.send(failure(&id, &error)).await.is_err() {
                    break;
                }
                continue;
            }
        };
        match &mut op {
            Op::Subscribe => service.events().subscribe(replies.clone()),
            Op::Capture(capture) if capture.staged.is_some() => {
                capture.client = Some(staged.begin(&id, replies.clone()));
            }
            Op::Proceed(proceed) => {
                if let Err(error) = staged.proceed(proceed) {
                    if replies.send(failure(&id, &error)).await.is_err() {
                        break;
                    }
                    continue;
                }
            }
            _ => {}
        }
        let Ok(permit) = in_flight.clone().acquire_owned().await else { break };
        let (service, bulk, replies, staged) = (service.clone(), bulk.clone(), replies.clone(), staged.clone());
        tasks.spawn(async move {
            let _permit = permit;
            let _turn = match op.is_bulk() {
                true => bulk.acquire().await.ok(),
                false => None,
            };
            let done = tokio::task::spawn_blocking(move || service.run(op)).await;
            staged.end(&id);
            let reply = match done {
                Ok(Ok(value)) => json!({"id": id, "ok": value}),
                Ok(Err(error)) => failure(&id, &error),
                Err(panic) => failure(&id, &Error::new(crate::Code::Io, format!("the operation failed: {panic}"))),
            };
            let _ = replies.send(reply).await;
        });
    }
    staged.give_up();
    drop(replies);
    while tasks.join_next().await.is_some() {}
}

fn failure(id: &Value, error: &Error) -> Value {
    json!({"id": id, "error": error})
}

fn parse(line: &[u8]) -> Result<(Value, Op), (Value, Error)> {
    let parsed: Result<Map<String, Value>, _> = serde_json::from_slice(line);
    let mut request =
        parsed.map_err(|e| (Value::Null, Error::invalid(format!("a request is one JSON object per line: {e}"))))?;
    let id = request.remove("id").unwrap_or(Value::Null);
    if !id.is_u64() && !id.is_string() {
        return Err((Value::Null, Error::invalid("a request needs \"id\", a number or string to tell its reply by")));
    }
    match Op::parse(request) {
        Ok(op) => Ok((id, op)),
        Err(error) => Err((id, error)),
    }
}

/// Reads one line without its end into `line`. False at the end of the stream; what comes after the last line's end is
/// ignored.
async fn next_line(read: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> Result<bool, Error> {
    loop {
        let Ok(available) = read.fill_buf().await else { return Ok(false) };
        if available.is_empty() {
            return Ok(false);
        }
        let end = available.iter().position(|byte| *byte == b'\n');
        let taken = end.unwrap_or(available.len());
        if line.len() + taken > MAX_LINE {
            return Err(Error::invalid(format!("a line has at most {MAX_LINE} bytes")));
        }
        line.extend_from_slice(&available[..taken]);
        read.consume(end.map_or(taken, |end| end + 1));
        match end {
            Some(_) if line.iter().all(u8::is_ascii_whitespace) => line.clear(),
            Some(_) => return Ok(true),
            None => {}
        }
    }
}
