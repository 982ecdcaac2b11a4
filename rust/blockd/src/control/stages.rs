//! Captures in stages: the client hears where one stands, and says when its guest stands still.

use std::collections::HashMap;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{json, Value};
use tokio::sync::mpsc;

use super::request::Proceed;
use crate::capture::CaptureError;
use crate::{Code, Error};

/// How long a prepared capture waits for its client.
const PATIENCE: Duration = Duration::from_secs(60);

/// The captures of a connection that are in stages, by the ids of their requests. Those that wait are given up when it is
/// dropped.
#[derive(Default)]
pub struct Staged(Mutex<HashMap<String, Sender<bool>>>);

impl Staged {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Sender<bool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one; its operation gets the other end.
    pub fn begin(&self, id: &Value, replies: mpsc::Sender<Value>) -> Client {
        let (sender, proceed) = channel();
        self.lock().insert(id.to_string(), sender);
        Client { id: id.clone(), replies, proceed }
    }

    /// Lets one go on, or gives it up.
    ///
    /// # Errors
    /// [`Code::NotFound`] if there is none that may have to wait.
    pub fn proceed(&self, request: &Proceed) -> Result<(), Error> {
        let waiting = self.lock().remove(&request.capture.to_string());
        match waiting.map(|waiting| waiting.send(!request.abandon)) {
            Some(Ok(())) => Ok(()),
            _ => {
                let id = &request.capture;
                Err(Error::new(Code::NotFound, format!("no capture {id} of this connection is waiting")))
            }
        }
    }

    /// Forgets one that has ended.
    pub fn end(&self, id: &Value) {
        self.lock().remove(&id.to_string());
    }

    /// Gives up all that wait.
    pub fn give_up(&self) {
        self.lock().clear();
    }
}

/// Who asked for a capture in stages.
#[derive(Debug)]
pub struct Client {
    id: Value,
    replies: mpsc::Sender<Value>,
    proceed: Receiver<bool>,
}

impl Client {
    fn tell(&self, stage: &str) {
        // A client that is gone is noticed when it should say something.
        let _ = self.replies.blocking_send(json!({"id": self.id, "stage": stage}));
    }

    /// Says that all is prepared; returns when the client's guest stands still.
    ///
    /// # Errors
    /// [`CaptureError::Abandoned`]: the client gave up, is gone, or said nothing for too long.
    pub fn ready(&self) -> Result<(), CaptureError> {
        self.tell("ready");
        match self.proceed.recv_timeout(PATIENCE) {
            Ok(true) => Ok(()),
            _ => Err(CaptureError::Abandoned),
        }
    }

    /// Says that the guest may go on.
    pub fn copied(&self) {
        self.tell("copied");
    }
}
